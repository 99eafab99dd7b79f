#define FDCPU_LEVEL 2
#define FDCPU_TILES 0
#define FDCPU_NAMESPACE avx512
#include "level.inl"
