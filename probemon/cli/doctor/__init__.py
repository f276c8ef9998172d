"""The command doctor: options (`command`), checks (`examination`), costs of settings (`measured_settings`)."""
