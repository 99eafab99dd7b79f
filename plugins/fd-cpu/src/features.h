// What this processor can do, and which of our instruction-set levels is used.
#pragma once
#include <string>
#include <vector>

namespace fdcpu {

// avx512_vnni is what Cascade Lake and Ice Lake have; avx512 has BF16, too. The emulated ones are for tests: the
// instructions of AMX, and of AVX512 without BF16, in plain C++ on AVX2.
enum class Isa { scalar, avx2, avx512_vnni, avx512, amx, emulated, emulated_vnni };

// Levels that this processor and operating system allow, the lowest first. "amx" asks the kernel for
// permission to use tiles, once.
const std::vector<Isa> &available_isas();
const char *name_of(Isa isa);
// By name; empty: the best. Throws std::invalid_argument that says what is possible.
Isa choose_isa(const std::string &name);

}  // namespace fdcpu
