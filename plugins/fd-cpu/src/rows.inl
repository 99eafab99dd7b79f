// Row-wise work: norms, gates, embedding rows, and the forms in which the products want activations.

namespace fdcpu::FDCPU_NAMESPACE {

template <class T>
FDCPU_INLINE void widen_row(const T *from, float *to, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i));
    for (; i < size; ++i) to[i] = load_one(from + i);
}

template <class T>
FDCPU_INLINE void add_row(const T *from, float *to, int64_t size, float factor = 1) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i) * factor + load(to + i));
    for (; i < size; ++i) to[i] += load_one(from + i) * factor;
}

template <class T>
FDCPU_INLINE void scale_to(const float *from, float factor, T *to, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i) * factor);
    for (; i < size; ++i) store_one(to + i, from[i] * factor);
}

template <class T>
FDCPU_INLINE void narrow_row(const float *from, T *to, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i));
    for (; i < size; ++i) store_one(to + i, from[i]);
}

// The same values as bfloat16, wider or not.
template <class T>
FDCPU_INLINE void round_row(const float *from, T *to, int64_t size) {
    if constexpr (sizeof(T) == 2) {
        narrow_row(from, to, size);
    } else {
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) store(to + i, round_to_bf16(load(from + i)));
        for (; i < size; ++i) {
            uint16_t rounded;
            store_one(&rounded, from[i]);
            to[i] = load_one(&rounded);
        }
    }
}

template <class X>
FDCPU_INLINE float sum_of_squares(const X *row, int64_t size) {
    F total = splat(0);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) total = load(row + i) * load(row + i) + total;
    float rest = sum_of(total);
    for (; i < size; ++i) rest += load_one(row + i) * load_one(row + i);
    return rest;
}

// The row over its root mean square, of which `squares` is the sum; `to` may be the row itself.
template <class X, class T, class Y>
FDCPU_INLINE void scale_row(const X *row, const T *weight, float squares, float eps, int64_t size, Y *to) {
    const float factor = 1.f / std::sqrt(squares / float(size) + eps);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(to + i, load(row + i) * factor * load(weight + i));
    for (; i < size; ++i) store_one(to + i, load_one(row + i) * factor * load_one(weight + i));
}

// `to`, which may be the row itself, becomes rms_norm(row).
template <class X, class T, class Y>
FDCPU_INLINE void normalize(const X *row, const T *weight, float eps, int64_t size, Y *to) {
    scale_row(row, weight, sum_of_squares(row, size), eps, size, to);
}

// x + update becomes the total, and what the next layer will read of it the row: its sum of squares.
template <class T>
FDCPU_INLINE float add_update(const T *x, const T *update, T *total, float *row, int64_t size) {
    F squares = splat(0);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(total + i, load(x + i) + load(update + i));
        const F value = load(total + i);
        store(row + i, value);
        squares = value * value + squares;
    }
    float rest = sum_of(squares);
    for (; i < size; ++i) {
        store_one(total + i, load_one(x + i) + load_one(update + i));
        row[i] = load_one(total + i);
        rest += row[i] * row[i];
    }
    return rest;
}

template <class T>
void norm_rows(const NormOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows, first, last);
    float *row = reinterpret_cast<float *>(worker.scratch) + worker.thread * op.width;
    const T *weight = static_cast<const T *>(op.weight);
    for (int64_t m = first; m < last; ++m) {
        const T *x = static_cast<const T *>(op.x) + m * op.width, *update = static_cast<const T *>(op.update);
        T *y = static_cast<T *>(op.y) + m * op.width;
        if (update) {
            T *total = static_cast<T *>(op.total) + m * op.width;
            const float squares = add_update(x, update + m * op.width, total, row, op.width);
            scale_row(row, weight, squares, op.eps, op.width, y);
        } else {
            normalize(x, weight, op.eps, op.width, y);
        }
    }
}

void norm(const NormOp &op, const Worker &worker) {
    op.type == DType::f32 ? norm_rows<float>(op, worker) : norm_rows<uint16_t>(op, worker);
}

template <class T>
void norm_heads(const HeadNormOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_tokens, first, last);
    for (int64_t t = first; t < last; ++t)
        for (int64_t h = 0; h < op.num_heads + op.num_kv_heads; ++h) {
            const bool is_query = h < op.num_heads;
            T *head = is_query ? static_cast<T *>(op.q) + t * op.q_stride + h * op.head_dim
                               : static_cast<T *>(op.k) + t * op.k_stride + (h - op.num_heads) * op.head_dim;
            normalize(head, static_cast<const T *>(is_query ? op.q_weight : op.k_weight), op.eps, op.head_dim, head);
        }
}

void head_norm(const HeadNormOp &op, const Worker &worker) {
    op.type == DType::f32 ? norm_heads<float>(op, worker) : norm_heads<uint16_t>(op, worker);
}

template <class T>
void gate_rows(const GateOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_rows * op.width, first, last);
    for (int64_t i = first; i < last;) {
        const int64_t m = i / op.width, column = i % op.width;
        const int64_t end = std::min(last, (m + 1) * op.width) - m * op.width;
        const T *gate = static_cast<const T *>(op.x) + m * 2 * op.width, *up = gate + op.width;
        T *y = static_cast<T *>(op.y) + m * op.width;
        int64_t c = column;
        for (; c + kLanes <= end; c += kLanes) store(y + c, silu(load(gate + c)) * load(up + c));
        for (; c < end; ++c) {
            const float g = load_one(gate + c);
            store_one(y + c, g / (1.f + std::exp(-g)) * load_one(up + c));
        }
        i = m * op.width + end;
    }
}

void gate(const GateOp &op, const Worker &worker) {
    op.type == DType::f32 ? gate_rows<float>(op, worker) : gate_rows<uint16_t>(op, worker);
}

template <class T>
void embed(const EmbeddingOp &op, const Worker &worker) {
    int64_t first, last;
    worker.share(op.num_ids, first, last);
    float *row = reinterpret_cast<float *>(worker.scratch) + worker.thread * op.width;
    for (int64_t i = first; i < last; ++i) {
        T *y = static_cast<T *>(op.y) + i * op.width;
        const int64_t id = op.ids[i];
        if (id < 0 || id >= op.num_rows) {
            std::memset(y, 0, size_t(op.width) * sizeof(T));  // not reachable from checked input
        } else if (op.packed) {
            get_row(*op.packed, id, row);
            narrow_row(row, y, op.width);
        } else {
            std::memcpy(y, static_cast<const T *>(op.table) + id * op.width, size_t(op.width) * sizeof(T));
        }
    }
}

void embedding(const EmbeddingOp &op, const Worker &worker) {
    op.type == DType::f32 ? embed<float>(op, worker) : embed<uint16_t>(op, worker);
}

}  // namespace fdcpu::FDCPU_NAMESPACE
