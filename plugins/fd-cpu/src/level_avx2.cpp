#define FDCPU_LEVEL 1
#define FDCPU_TILES 0
#define FDCPU_NAMESPACE avx2
#include "level.inl"
