"""Steps as captured CUDA graphs, by the shapes that they are padded to."""
