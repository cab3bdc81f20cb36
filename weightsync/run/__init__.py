"""A run's directory, whatever moves the bytes: its one sender, and the records of its receivers."""
