"""A library of concepts that people watch for, and its fit to a model."""
