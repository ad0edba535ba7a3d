"""An ordinary app with the two lines."""
