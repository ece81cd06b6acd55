"""Both products for many rows an expert, on GPUs with warpgroup matrix instructions and a bulk tensor copy engine (compute capability 9.x)."""
