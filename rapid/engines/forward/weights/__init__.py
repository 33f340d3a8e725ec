"""The weights of a checkpoint, as they are stored or quantized, in a model that runs."""
