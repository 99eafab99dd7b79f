#define FDCPU_LEVEL 2
#define FDCPU_TILES 2
#define FDCPU_NAMESPACE emulated
#include "emulated_instructions.h"

#include "level.inl"
