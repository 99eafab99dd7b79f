// What this processor can do, and which of our instruction-set levels is used.
#pragma once
#include <string>
#include <vector>

namespace fdcpu {

enum class Isa { scalar = 0, avx2 = 1, avx512_vnni = 2, avx512 = 3, amx = 4, emulated = 5 };

// Levels that this processor and operating system allow, the lowest first. "amx" asks the kernel for
// permission to use tiles, once.
const std::vector<Isa> &available_isas();
const char *name_of(Isa isa);
// By name ("scalar", "avx2", "avx512_vnni", "avx512", "amx"; empty: the best). Throws std::invalid_argument that says
// what is possible. "emulated" is for tests: the AMX level with its instructions in plain C++, on AVX2.
Isa choose_isa(const std::string &name);

}  // namespace fdcpu
