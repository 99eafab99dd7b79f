// Between logits and tokens, rows of float32 over the vocabulary: penalties, masks, top-k, top-p and min-p
// without sorting, draws that depend on seed and position only. Meanings: fastdeploy_core/contracts/ops.py.

namespace fdcpu::FDCPU_NAMESPACE {

using I64 = int64_t __attribute__((vector_size(64)));
using F8 = float __attribute__((vector_size(32)));

// ---- draws: the random numbers of fastdeploy_core/reference/random.py, bit for bit

constexpr int64_t kGolden = int64_t(0x9E3779B97F4A7C15), kMix1 = int64_t(0xBF58476D1CE4E5B9);
constexpr int64_t kMix2 = int64_t(0x94D049BB133111EB), kMix3 = int64_t(0xFF51AFD7ED558CCD);
constexpr int64_t kMix4 = int64_t(0xC4CEB9FE1A85EC53), kIndexStep = int64_t(0xD1342543DE82EF95);
constexpr int64_t kIndexStart = int64_t(0x2545F4914F6CDD1D), kLowMask = (int64_t(1) << 40) - 1;
constexpr float kLargestBelowOne = 1.f - 0x1p-24f;
// No token arrives earlier than e to this, so one that is less likely by as much cannot win.
constexpr float kEarliest = 29.f;

// Multiplication modulo 2^64, which signed integers do not promise.
template <class V>
FDCPU_INLINE V times(V a, int64_t b) {
    if constexpr (sizeof(V) == 8)
        return V(uint64_t(a) * uint64_t(b));
    else
        return a * (I64{} + b);
}

template <class V>
FDCPU_INLINE V mix(V x) {
    x = times(x ^ (x >> 30), kMix1);
    x = times(x ^ (x >> 27), kMix2);
    return x ^ (x >> 31);
}

FDCPU_INLINE int64_t plus(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }

// Uniform numbers of eight tokens from `first` on.
FDCPU_INLINE F8 uniforms(int64_t key, int64_t first) {
    const I64 index = I64{0, 1, 2, 3, 4, 5, 6, 7} + first;
    I64 x = mix(times(index, kIndexStep) + kIndexStart) ^ key;
    x = times(x, kMix3);
    x ^= x >> 32;
    x = times(x, kMix4);
    return (__builtin_convertvector((x >> 24) & kLowMask, F8) + 0.5f) * 0x1p-40f;
}

// Every thread lets its part of the vocabulary race, for all rows; the first then compares the winners.
void sample(const SampleOp &op, const Worker &worker) {
    auto *arrivals = reinterpret_cast<float *>(worker.scratch);
    auto *ids = reinterpret_cast<int64_t *>(arrivals + (op.num_rows * worker.crew + 1) / 2 * 2);
    int64_t first, last;
    worker.share((op.width + kLanes - 1) / kLanes, first, last);
    const auto is_drawn = [&](int64_t row) { return !op.is_random || op.is_random[row]; };
    for (int64_t m = 0; m < op.num_rows; ++m) {
        if (!is_drawn(m)) continue;
        const float *row = op.logits + m * op.width;
        const int64_t place = op.positions[m] + op.ahead;
        const int64_t key = mix(plus(mix(plus(op.seeds[m], kGolden)), times(place, kGolden)));
        float best = -INFINITY;
        int64_t winner = op.width;
        for (int64_t begin = first * kLanes; begin < std::min(op.width, last * kLanes); begin += kLanes) {
            F logits = splat(-INFINITY);
            const int64_t count = std::min<int64_t>(kLanes, op.width - begin);
            std::memcpy(&logits, row + begin, size_t(count) * sizeof(float));
            if (!(max_of(logits) > best - kEarliest) && max_of(logits) == max_of(logits)) continue;
            // A token arrives at -log(1 - u) / likelihood, so not before u / likelihood.
            const bool has_best = best > -INFINITY;
            const F limit = exponential(logits - (has_best ? best : 0.f)) * 1.0001f;
            float u[kLanes];
            store_as(u, uniforms(key, begin));
            store_as(u + 8, uniforms(key, begin + 8));
            for (int64_t i = 0; i < count; ++i) {
                const float logit = logits[i];
                if (logit == -INFINITY || (has_best && u[i] >= limit[i])) continue;
                const float arrival = logit - std::log(-std::log1p(-std::min(u[i], kLargestBelowOne)));
                if (!(arrival > best)) continue;
                best = arrival;
                winner = begin + i;
            }
        }
        arrivals[m * worker.crew + worker.thread] = best;
        ids[m * worker.crew + worker.thread] = winner;
    }
    worker.barrier();
    if (worker.thread) return;
    for (int64_t m = 0; m < op.num_rows; ++m) {
        if (!is_drawn(m)) continue;
        int64_t best = 0;
        for (int64_t t = 1; t < worker.crew; ++t)
            if (arrivals[m * worker.crew + t] > arrivals[m * worker.crew + best]) best = t;
        const int64_t id = ids[m * worker.crew + best];
        op.ids[m] = id < op.width ? id : 0;
    }
}

void temper(const TemperatureOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows * op.width, first, last);
    for (int64_t row = first / op.width; row * op.width < last; ++row) {
        const float temperature = op.temperatures[row];
        if (temperature == 1.f) continue;
        const int64_t end = std::min(last, (row + 1) * op.width);
        for (int64_t i = std::max(first, row * op.width); i < end; ++i) op.logits[i] /= temperature;
    }
}

// ---- filters: the smallest logit to keep is found by counting, or weighing, what lies above it

FDCPU_INLINE uint32_t ordered(float x) {  // greater floats are greater integers
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
FDCPU_INLINE float from_ordered(uint32_t key) {
    const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

struct Candidates {
    uint32_t *keys;
    float *weights;
    double *bins;  // 2048
    int64_t count;
};

// Of descending candidates the last one before which less than `wanted` of the weight lies. Candidates
// are consumed: eleven bits of the key at a time, only those of the right bin go on.
FDCPU_INLINE uint32_t weigh(Candidates &c, double wanted) {
    double above = 0;
    uint32_t key = 0;
    for (int shift : {21, 10, 0}) {
        const int size = shift == 0 ? 1024 : 2048;
        std::fill(c.bins, c.bins + size, 0.0);
        for (int64_t i = 0; i < c.count; ++i) c.bins[(c.keys[i] >> shift) & (size - 1)] += c.weights[i];
        int chosen = -1;
        double before = above;
        for (int bin = size - 1; bin >= 0; --bin) {
            if (c.bins[bin] == 0) continue;
            if (chosen >= 0 && !(above < wanted)) break;
            chosen = bin;
            before = above;
            above += c.bins[bin];
        }
        above = before;
        key |= uint32_t(chosen) << shift;
        int64_t kept = 0;
        for (int64_t i = 0; i < c.count; ++i)
            if (int((c.keys[i] >> shift) & (size - 1)) == chosen) {
                c.keys[kept] = c.keys[i];
                c.weights[kept++] = c.weights[i];
            }
        c.count = kept;
    }
    return key;
}

size_t filter_scratch(const FilterOp &op, int num_threads) {
    return size_t(num_threads) * size_t((op.width + 15) / 8 * 8 * 8 + 2048 * 8) + 64;
}

FDCPU_INLINE float smallest_kept(const FilterOp &op, int64_t m, Candidates c) {
    const float *row = op.logits + m * op.width;
    F peaks = splat(-INFINITY);
    int64_t i = 0;
    for (; i + kLanes <= op.width; i += kLanes) peaks = maximum(load(row + i), peaks);
    float peak = max_of(peaks);
    for (; i < op.width; ++i) peak = std::max(peak, row[i]);
    float least = peak + std::log(op.min_p[m]);
    auto gather = [&](bool weighs) {
        c.count = 0;
        for (int64_t j = 0; j < op.width; ++j) {
            c.keys[c.count] = ordered(row[j]);
            c.weights[c.count] = weighs ? row[j] - peak : 1.f;
            c.count += row[j] >= least && row[j] > -INFINITY;
        }
        if (!weighs) return;
        for (int64_t j = 0; j < c.count; j += kLanes) store(c.weights + j, exponential(load(c.weights + j)));
    };
    if (op.top_k[m] > 0 && op.top_k[m] < op.width) {
        gather(false);
        if (c.count > op.top_k[m]) least = std::max(least, from_ordered(weigh(c, double(op.top_k[m]))));
    }
    if (op.top_p[m] < 1) {
        gather(true);
        double total = 0;
        for (int64_t j = 0; j < c.count; ++j) total += c.weights[j];
        if (c.count) least = std::max(least, from_ordered(weigh(c, double(op.top_p[m]) * total)));
    }
    return least;
}

// In place: -inf outside the kept set.
void filter(const FilterOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows, first, last);
    const int64_t room = (op.width + 15) / 8 * 8;
    uint8_t *own = worker.scratch + worker.thread * (room * 8 + 2048 * 8);
    const Candidates c{reinterpret_cast<uint32_t *>(own), reinterpret_cast<float *>(own + room * 4),
                       reinterpret_cast<double *>(own + room * 8), 0};
    for (int64_t m = first; m < last; ++m) {
        const float least = smallest_kept(op, m, c);
        float *row = op.logits + m * op.width;
        for (int64_t i = 0; i < op.width; ++i) row[i] = row[i] < least ? -INFINITY : row[i];
    }
}

// ---- one pass each

template <class C>
void penalize_as(const PenaltyOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows * op.width, first, last);
    const C *counts = static_cast<const C *>(op.counts);
    for (int64_t i = first; i < last;) {
        const int64_t m = i / op.width, end = std::min(last, (m + 1) * op.width);
        const float presence = op.presence[m], frequency = op.frequency[m], repetition = op.repetition[m];
        for (; i < end; ++i) {
            const bool generated = counts[i] > 0;
            float x = op.logits[i];
            if (generated || op.prompt_seen[i]) x = x > 0 ? x / repetition : x * repetition;
            op.logits[i] = x - frequency * float(counts[i]) - (generated ? presence : 0.f);
        }
    }
}

void penalize(const PenaltyOp &op, const Worker &worker) {
    switch (op.count_bytes) {
        case 1: return penalize_as<int8_t>(op, worker);
        case 2: return penalize_as<int16_t>(op, worker);
        case 4: return penalize_as<int32_t>(op, worker);
        default: return penalize_as<int64_t>(op, worker);
    }
}

void mask(const MaskOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows * op.width, first, last);
    const int64_t words = (op.width + 31) / 32;
    for (int64_t i = first; i < last; ++i) {
        const int64_t m = i / op.width, t = i % op.width;
        if (!(uint32_t(op.bits[m * words + t / 32]) >> (t % 32) & 1)) op.logits[i] = -INFINITY;
    }
}

void log_softmax(const LogSoftmaxOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows, first, last);
    for (int64_t m = first; m < last; ++m) {
        const float *x = op.logits + m * op.width;
        float *y = op.y + m * op.width;
        float peak = -INFINITY;
        for (int64_t i = 0; i < op.width; ++i) peak = x[i] > peak || x[i] != x[i] ? x[i] : peak;
        double total = 0;
        int64_t i = 0;
        for (; i + kLanes <= op.width; i += kLanes) total += sum_of(exponential(load(x + i) - peak));
        for (; i < op.width; ++i) total += std::exp(x[i] - peak);
        const float shift = peak + float(std::log(total));
        for (i = 0; i < op.width; ++i) y[i] = x[i] - shift;
    }
}

}  // namespace fdcpu::FDCPU_NAMESPACE
