"""The parts of `demo.py`: a fire drill for a fleet of beats, on real processes."""
