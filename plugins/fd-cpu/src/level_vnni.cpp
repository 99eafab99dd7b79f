// AVX-512 as Cascade Lake and Ice Lake have it: bytes are multiplied in pairs, bfloat16 is not.
#define FDCPU_LEVEL 2
#define FDCPU_TILES 0
#define FDCPU_WITHOUT_BF16 1
#define FDCPU_NAMESPACE avx512_vnni
#include "level.inl"
