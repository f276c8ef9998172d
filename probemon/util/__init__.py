"""Tools without a subject; they import errors alone."""
