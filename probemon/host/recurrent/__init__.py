"""The recurrent layers of a host: where their steps and states are read, and the recurrence itself."""
