// Tail-biting Viterbi search over the tet2 trellis, for processors. Called through ctypes by
// encoder.py, which also says what the arguments mean; compiled there on first use.
//
// States are kept bit-reversed (newest symbol lowest), so that the states that end in one edge are
// a whole stretch of memory apart and 16 edges are computed side by side. LANES strands run in lock
// step: the codebook, which does not fit into the first cache, is then read once for all of them.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int kStateBits = 16;
constexpr int kStates = 1 << kStateBits;
constexpr int kLanes = 4;
constexpr int kWide = 16;
typedef float Floats __attribute__((vector_size(4 * kWide)));
typedef int32_t Ints __attribute__((vector_size(4 * kWide)));

struct Codebook {
  const float* first;   // [states], bit-reversed order
  const float* second;  // [states]
  const float* norm;    // [states]: half the squared length of the pair
};

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

template <int kBits>
struct Trellis {
  static constexpr int kEdgeBits = kStateBits - kBits;
  static constexpr int kEdges = 1 << kEdgeBits;
  static constexpr int kBranches = 1 << kBits;

  // One step for all lanes. cost: [lane][edge], before and after; back: [lane][edge], which branch won.
  static void step(const Codebook& book, const float* before, float* after, uint8_t* back,
                   size_t back_stride, const float* const* x, int position) {
    Floats a[kLanes], b[kLanes];
    for (int l = 0; l < kLanes; l++) {
      a[l] = Floats{} + x[l][2 * position];
      b[l] = Floats{} + x[l][2 * position + 1];
    }
    for (int e = 0; e < kEdges; e += kWide) {
      Floats best[kLanes];
      Ints arg[kLanes];
      for (int l = 0; l < kLanes; l++) {
        best[l] = Floats{} + 3e38f;
        arg[l] = Ints{};
      }
      for (int k = 0; k < kBranches; k++) {
        const size_t state = static_cast<size_t>(k) * kEdges + e;
        const Floats first = load(book.first + state), second = load(book.second + state);
        const Floats norm = load(book.norm + state);
        // Sixteen neighbouring states come from one edge: 16 is at most the number of branches.
        const size_t from = state >> kBits;
        for (int l = 0; l < kLanes; l++) {
          const Floats total = (norm + before[l * kEdges + from]) - a[l] * first - b[l] * second;
          const Ints better = total < best[l];
          best[l] = better ? total : best[l];
          arg[l] = better ? Ints{} + k : arg[l];
        }
      }
      for (int l = 0; l < kLanes; l++) {
        store(after + l * kEdges + e, best[l]);
        uint8_t* out = back + l * back_stride + e;
        for (int i = 0; i < kWide; i++) out[i] = static_cast<uint8_t>(arg[l][i]);
      }
    }
  }

  // Costs start from zero everywhere (edge < 0) or from one edge; each lane may have its own.
  static void start(float* cost, const int* edge) {
    for (int l = 0; l < kLanes; l++)
      for (int e = 0; e < kEdges; e++)
        cost[l * kEdges + e] = edge[l] < 0 || e == edge[l] ? 0.f : 1e30f;
  }

  // Best path through `count` steps; states: [lane][count], bit-reversed. Ends in the edge it began
  // with where that is given.
  static void path(const Codebook& book, const float* const* x, int count, const int* edge,
                   std::vector<float>& one, std::vector<float>& two, std::vector<uint8_t>& back,
                   uint32_t* const* states) {
    start(one.data(), edge);
    const size_t stride = static_cast<size_t>(count) * kEdges;
    float *before = one.data(), *after = two.data();
    for (int t = 0; t < count; t++) {
      step(book, before, after, back.data() + static_cast<size_t>(t) * kEdges, stride, x, t);
      float* swap = before;
      before = after;
      after = swap;
    }
    for (int l = 0; l < kLanes; l++) {
      int e = edge[l];
      if (e < 0) {
        e = 0;
        for (int i = 1; i < kEdges; i++)
          if (before[l * kEdges + i] < before[l * kEdges + e]) e = i;
      }
      for (int t = count - 1; t >= 0; t--) {
        const uint32_t k = back[l * stride + static_cast<size_t>(t) * kEdges + e];
        const uint32_t state = (k << kEdgeBits) | static_cast<uint32_t>(e);
        states[l][t] = state;
        e = static_cast<int>(state >> kBits);
      }
    }
  }

  static void encode(const Codebook& book, const float* strands, long count, int length,
                     uint16_t* out) {
    const int symbols = length / 2, window = symbols / 2, half = window / 2;
    std::vector<float> one(kLanes * kEdges), two(kLanes * kEdges);
    std::vector<uint8_t> back(static_cast<size_t>(kLanes) * symbols * kEdges);
    std::vector<float> seam(static_cast<size_t>(kLanes) * 2 * window);
    std::vector<uint32_t> found(static_cast<size_t>(kLanes) * symbols);
    for (long base = 0; base < count; base += kLanes) {
      const float* x[kLanes];
      const float* around[kLanes];
      uint32_t* states[kLanes];
      int edge[kLanes];
      for (int l = 0; l < kLanes; l++) {
        const long strand = base + l < count ? base + l : count - 1;
        x[l] = strands + strand * length;
        float* copy = seam.data() + static_cast<size_t>(l) * 2 * window;
        for (int t = 0; t < window; t++) {
          const int source = (t - half + symbols) % symbols;
          copy[2 * t] = x[l][2 * source];
          copy[2 * t + 1] = x[l][2 * source + 1];
        }
        around[l] = copy;
        states[l] = found.data() + static_cast<size_t>(l) * symbols;
        edge[l] = -1;
      }
      // A free path around the seam tells which edge the ring should close in.
      path(book, around, window, edge, one, two, back, states);
      for (int l = 0; l < kLanes; l++) edge[l] = static_cast<int>(states[l][half] >> kBits);
      path(book, x, symbols, edge, one, two, back, states);
      for (int l = 0; l < kLanes && base + l < count; l++)
        for (int t = 0; t < symbols; t++)
          out[(base + l) * symbols + t] = static_cast<uint16_t>(states[l][t]);
    }
  }
};

}  // namespace

extern "C" int fd_tet2_encode(int bits, const float* first, const float* second, const float* norm,
                              const float* strands, long count, int length, uint16_t* out) {
  const Codebook book{first, second, norm};
  if (count < 1 || length % 8) return count == 0 ? 0 : 1;
  if (bits == 4) Trellis<4>::encode(book, strands, count, length, out);
  else if (bits == 6) Trellis<6>::encode(book, strands, count, length, out);
  else if (bits == 8) Trellis<8>::encode(book, strands, count, length, out);
  else return 1;
  return 0;
}
