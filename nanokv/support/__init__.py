"""Around the library: hints for habits and missing packages, and the time stamps of a start."""
