// Put in front of llama.cpp's C++ files. GCC before 12.4 and 13.3 tells its optimizer that
// _tile_loadconfig reads 8 of the 64 bytes, so that the shapes of AMX tiles are never stored, and
// the first tile instruction ends the program with SIGILL (GCC bug 114098).
#ifdef __AMX_TILE__
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg\t%0" ::"m"(*reinterpret_cast<const char(*)[64]>(config)))
#endif
