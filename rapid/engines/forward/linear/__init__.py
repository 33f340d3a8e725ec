"""Products of rows with weights: as they are, in half precision, or quantized."""
