"""Both products of a layer in one launch, on GPUs with warpgroup matrix instructions and a bulk tensor copy engine (compute capability 9.x)."""
