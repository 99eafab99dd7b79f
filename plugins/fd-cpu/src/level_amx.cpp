#define FDCPU_LEVEL 2
#define FDCPU_TILES 1
#define FDCPU_NAMESPACE amx
#include "level.inl"
