"""Published scaling results: rows of a CSV file, the fit of the calibration to them, and its cross-validation."""
