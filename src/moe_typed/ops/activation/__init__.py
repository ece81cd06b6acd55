"""Split joined gate/up rows in any order, apply the activation, and quantise where the next GEMM is fp8."""
