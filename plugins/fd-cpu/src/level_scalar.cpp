#define FDCPU_LEVEL 0
#define FDCPU_TILES 0
#define FDCPU_NAMESPACE scalar
#include "level.inl"
