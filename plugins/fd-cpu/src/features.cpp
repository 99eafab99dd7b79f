#include "features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>
#include <stdexcept>

namespace fdcpu {

namespace {

// What cpuid says; zeros of a leaf that the processor does not have.
struct CpuId {
    unsigned a = 0, b = 0, c = 0, d = 0;
    explicit CpuId(unsigned leaf, unsigned subleaf = 0) { __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d); }
};

bool has_bits(unsigned word, std::initializer_list<int> bits) {
    for (int bit : bits)
        if (!(word >> bit & 1)) return false;
    return true;
}

// Registers that the operating system saves for every thread (XCR0).
unsigned saved_registers() {
    unsigned low, high;
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// By cpuid, not by the compiler's __builtin_cpu_supports: that needs a part of the compiler's own library.
std::vector<Isa> detect() {
    std::vector<Isa> found{Isa::scalar};
    const CpuId base(1), more(7), newest(7, 1);
    constexpr int kFma = 12, kOsSaves = 27, kAvx = 28, kHalves = 29, kAvx2 = 5;
    if (!has_bits(base.c, {kFma, kOsSaves, kAvx, kHalves}) || !has_bits(more.b, {kAvx2})) return found;
    const unsigned saved = saved_registers();
    if (!has_bits(saved, {1, 2})) return found;  // xmm, ymm
    found.push_back(Isa::avx2);
    constexpr int kFoundation = 16, kDoubleQuad = 17, kByteWord = 30, kVectorLength = 31, kVnni = 11, kBf16 = 5;
    const bool has_avx512 = has_bits(more.b, {kFoundation, kDoubleQuad, kByteWord, kVectorLength}) &&
                            has_bits(more.c, {kVnni}) && has_bits(saved, {5, 6, 7});  // masks, zmm
    if (!has_avx512) return found;
    found.push_back(Isa::avx512_vnni);
    if (!has_bits(newest.a, {kBf16})) return found;
    found.push_back(Isa::avx512);
    constexpr int kTiles = 24, kTilesInt8 = 25, kTilesBf16 = 22;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    if (has_bits(more.d, {kTiles, kTilesInt8, kTilesBf16}) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0)
        found.push_back(Isa::amx);
    return found;
}

}  // namespace

const std::vector<Isa> &available_isas() {
    static const std::vector<Isa> isas = detect();
    return isas;
}

const char *name_of(Isa isa) {
    constexpr const char *names[] = {"scalar", "avx2", "avx512_vnni", "avx512", "amx", "emulated", "emulated_vnni"};
    return names[int(isa)];
}

Isa choose_isa(const std::string &name) {
    const auto &isas = available_isas();
    if (name.empty()) return isas.back();
#ifdef FDCPU_EMULATED
    for (Isa isa : {Isa::emulated, Isa::emulated_vnni})
        if (name == name_of(isa) && isas.size() > 1) return isa;
#endif
    std::string possible;
    for (Isa isa : isas) {
        if (name == name_of(isa)) return isa;
        possible += std::string(possible.empty() ? "" : " | ") + name_of(isa);
    }
    throw std::invalid_argument("instruction set '" + name + "' is not available on this processor; possible: " +
                                possible);
}

}  // namespace fdcpu
