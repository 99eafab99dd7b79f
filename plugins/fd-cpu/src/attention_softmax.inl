// The softmax between scores and values, block by block: a running peak and sum (online softmax, arXiv
// 1805.02867). A row's sum stays a register of sixteen parts until the row is complete, and its peak stays
// where it is while scores rise little above it: sums and results then need no scaling.

namespace fdcpu::FDCPU_NAMESPACE {

constexpr float kSlack = 6;         // powers of two by which weights may be above 1
constexpr int64_t kFewPeaks = 8;    // rows whose peaks are found one by one

// The largest of `whole` numbers, lane by lane. Two chains: one would wait for itself. NaN is left out.
FDCPU_INLINE F peaks_of(const float *scores, int64_t whole) {
    F even = splat(-INFINITY), odd = even;
    int64_t t = 0;
    for (; t + kLanes < whole; t += 2 * kLanes) {
        even = maximum(load(scores + t), even);
        odd = maximum(load(scores + t + kLanes), odd);
    }
    if (t < whole) even = maximum(load(scores + t), even);
    return maximum(odd, even);
}

// Each row's largest lane.
FDCPU_INLINE F largest_of(U (&rows)[kLanes], int64_t count) {
    if (count <= kFewPeaks) {
        float found[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) found[i] = i < count ? max_of(F(rows[i])) : -INFINITY;
        return load(found);
    }
    transpose(rows);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) rows[i] = U(maximum(F(rows[i]), F(rows[i + width])));
    return F(rows[0]);
}

// Sums and results of up to sixteen rows from `r` on are brought to a higher peak.
FDCPU_INLINE void scale_rows(const AttentionOp &op, const AttentionScratch &s, int64_t r, int64_t count,
                             const float *factors) {
    for (int64_t i = r; i < r + count; ++i) {
        const float factor = factors[i - r];
        if (factor == 1.f) continue;
        store(s.sum + i * kLanes, load(s.sum + i * kLanes) * factor);
        float *out = s.out + i * op.v_head_dim;
        int64_t d = 0;
        for (; d + kLanes <= op.v_head_dim; d += kLanes) store(out + d, load(out + d) * factor);
        for (; d < op.v_head_dim; ++d) out[d] *= factor;
    }
}

// A score whose logit is softcap * tanh(logit / softcap); a logit is scale * score.
FDCPU_INLINE F capped(const AttentionOp &op, F score) {
    const F power = exponential(score * (2 * op.scale / op.softcap));
    return (splat(1) - splat(2) / (power + 1.f)) * (op.softcap / op.scale);
}

// Scores of `count` rows, at most sixteen, `stride` apart, for `width` tokens from `first_token` on become
// weights, in `pairs` as bfloat16 unless that is null.
FDCPU_INLINE void soften_rows(const AttentionOp &op, const AttentionScratch &s, int64_t r, int64_t count,
                              int64_t first_token, int64_t width, int64_t stride, float *scores, Input *pairs) {
    int64_t whole[kLanes];
    U found[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
        found[i] = U(splat(-INFINITY));
        if (i >= count) continue;
        float *row = scores + i * stride;
        const int64_t valid = std::max<int64_t>(0, std::min(width, s.limit[r + i] - first_token));
        const int64_t unseen = s.start[r + i] - first_token;  // in front of what the row sees
        whole[i] = unseen < valid ? (valid + kLanes - 1) / kLanes * kLanes : 0;
        if (!whole[i]) continue;
        for (int64_t t = 0; t < whole[i] && op.key_scales; t += kLanes)
            store(row + t, load(row + t) * load(s.key_scale + t));
        for (int64_t t = 0; t < whole[i] && op.softcap; t += kLanes) store(row + t, capped(op, load(row + t)));
        for (int64_t t = 0; t < unseen; t += kLanes)
            store(row + t, select(kLaneNumbers < splat_int(int32_t(unseen - t)), splat(-INFINITY), load(row + t)));
        const int64_t last = whole[i] - kLanes;
        const I counts = kLaneNumbers < splat_int(int32_t(valid - last));
        if (valid < whole[i]) store(row + last, select(counts, load(row + last), splat(-INFINITY)));
        found[i] = U(peaks_of(row, whole[i]));
    }
    const float step = op.scale * 1.44269504f;
    const F before = load(s.peak + r), top = largest_of(found, count);
    const I grows = (top - before) * step > kSlack;
    const F peak = select(grows, top, before);
    if (any(grows)) {
        // Of rows without a peak sums and results are nothing yet.
        float factors[kLanes];
        store(factors, select(grows & (before > splat(-INFINITY)), exponential((before - peak) * op.scale), splat(1)));
        scale_rows(op, s, r, count, factors);
        store(s.peak + r, peak);
    }
    for (int64_t i = 0; i < count; ++i) {
        float *row = scores + i * stride;
        Input *to = pairs ? pairs + i * stride : nullptr;
        const float base = -s.peak[r + i] * step;
        F total = load(s.sum + (r + i) * kLanes);  // of which a score that is no number makes none, too
        int64_t t = 0;
        for (; t < whole[i]; t += kLanes) {
            F weight = pairs ? rough_power_of_two(load(row + t) * step + base)
                             : exponential((load(row + t) - s.peak[r + i]) * op.scale);
            total += weight;
            // Scales after the last token may be anything.
            if (op.value_scales) weight = select(weight == splat(0), weight, weight * load(s.value_scale + t));
            pairs ? store(to + t, weight) : store(row + t, weight);
        }
        for (; t < width; t += kLanes) pairs ? store(to + t, splat(0)) : store(row + t, splat(0));
        store(s.sum + (r + i) * kLanes, total);
    }
}

// The same for any number of rows.
FDCPU_INLINE void soften(const AttentionOp &op, const AttentionScratch &s, int64_t r, int64_t rows, int64_t first_token,
                         int64_t width, int64_t stride, float *scores, Input *pairs) {
    for (int64_t i = 0; i < rows; i += kLanes)
        soften_rows(op, s, r + i, std::min<int64_t>(kLanes, rows - i), first_token, width, stride, scores + i * stride,
                    pairs ? pairs + i * stride : nullptr);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
