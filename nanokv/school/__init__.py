"""What the notebooks and the bundled model are made with: the course and the training."""
