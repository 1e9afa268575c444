"""The code behind the notebooks (`course`) and behind the bundled model (`training`)."""
