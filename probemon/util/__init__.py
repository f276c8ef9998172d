"""Helpers without a subject; they import only `probemon.errors`."""
