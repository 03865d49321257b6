"""Will a training loop fit a device, and what makes it fit? On a trace, without torch."""
