"""The same scores inside vLLM, at the token, in the process that runs the model."""
