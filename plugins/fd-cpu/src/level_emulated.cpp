#define FDCPU_LEVEL 0
#define FDCPU_TILES 2
#define FDCPU_NAMESPACE emulated
#include "level.inl"
