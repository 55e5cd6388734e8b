"""What the recorded steps would take with something changed: settings in, predicted step time out."""
