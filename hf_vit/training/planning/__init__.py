"""What a training is like where nobody says so: facts of data and device, defaults by them, a budget in minutes."""
