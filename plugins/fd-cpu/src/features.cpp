#include "features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace fdcpu {

namespace {

bool amx_permitted() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool has_tiles = (d >> 24 & 1) && (d >> 25 & 1) && (d >> 22 & 1);  // tile, int8, bf16
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_avx512_bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

std::vector<Isa> detect() {
    std::vector<Isa> found{Isa::scalar};
    __builtin_cpu_init();  // also asks the operating system whether it saves the registers
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return found;
    found.push_back(Isa::avx2);
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    if (!avx512) return found;
    found.push_back(Isa::avx512_vnni);
    if (!has_avx512_bf16()) return found;
    found.push_back(Isa::avx512);
    if (amx_permitted()) found.push_back(Isa::amx);
    return found;
}

}  // namespace

const std::vector<Isa> &available_isas() {
    static const std::vector<Isa> isas = detect();
    return isas;
}

const char *name_of(Isa isa) {
    constexpr const char *names[] = {"scalar", "avx2", "avx512_vnni", "avx512", "amx", "emulated"};
    return names[int(isa)];
}

Isa choose_isa(const std::string &name) {
    const auto &isas = available_isas();
    if (name.empty()) return isas.back();
#ifdef FDCPU_EMULATED
    if (name == name_of(Isa::emulated) && isas.size() > 1) return Isa::emulated;
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
