"""How a job ended, where it failed: ``crash``."""
