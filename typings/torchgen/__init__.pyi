# torchgen, which comes with torch and has types, but does not say so.
