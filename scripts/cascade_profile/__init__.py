"""The pieces of scripts/profile_cascade.py: what is measured (`world`) and how it is shown (`report`)."""
