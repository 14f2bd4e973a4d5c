"""Tables, progress bars and plots of what was planned and what happened."""
