"""What every package may use: files that are complete or absent, the device, the processes, random numbers."""
