// Sums of a tile of quant_blocks.cu: a turn's are made by the matrix units, multiplied with its scales and added up outside.

// What sums of a turn are multiplied with: a thread's two rows', and every 128 outputs'.
struct Scales {
  float of_rows[2], of_outputs[COLUMNS / 128];
};

// What a warp needs of the ring: its group's rows of x, and scales of its own ones.
struct Own {
  u32 x;
  const float *of_rows, *of_outputs;
};

__device__ __forceinline__ Own own_of(const Ring& ring, int warp, int lane) {
  return {ring.base + warp / 4 * 64 * 128, (const float*)ring.lines + warp * 16 + (lane >> 2), (const float*)ring.lines + ROWS};
}

__device__ __forceinline__ Scales scales_of(const Own& own, int stage) {
  const float *of_rows = own.of_rows + stage * (LINE / 4), *of_outputs = own.of_outputs + stage * (LINE / 4);
  Scales scales = {{of_rows[0], of_rows[8]}, {}};
#pragma unroll
  for (int i = 0; i < COLUMNS / 128; i++) scales.of_outputs[i] = of_outputs[i];
  return scales;
}

// What a warp does that needs a turn no more: neither its operands nor its scales, which all lanes have read.
__device__ __forceinline__ void set_free(const Ring& ring, int stage, int lane) {
  __syncwarp();
  if (lane == 0) arrive_at(ring.empty + 8 * stage);
}

// Ask the matrix units for the sums of a wave of this turn, which is there.
__device__ __forceinline__ void ask(float (&sum)[BN / 2], const Ring& ring, const Own& own, int stage, int wave) {
  const u64 tile_x = descriptor(own.x + stage * STAGE);
  const u64 tile_w = descriptor(ring.base + stage * STAGE + TILE_X + wave * BN * 128);
  fence_registers(sum);
  begin_products();
  multiply<0>(sum, tile_x, tile_w);
#pragma unroll
  for (int s = 1; s < 4; s++) multiply<1>(sum, tile_x + s * 2, tile_w + s * 2);
  end_products();
}

template <int left>
__device__ __forceinline__ void await_sum(float (&sum)[BN / 2]) {
  await_products<left>();
  fence_registers(sum);
}

__device__ __forceinline__ void add(float (&total)[BN / 2], const float (&sum)[BN / 2], const Scales& scales, int wave) {
  const float of_outputs = scales.of_outputs[wave * BN / 128];
  const float both[2] = {scales.of_rows[0] * of_outputs, scales.of_rows[1] * of_outputs};
#pragma unroll
  for (int i = 0; i < BN / 2; i++) total[i] = fmaf(sum[i], both[i / 2 % 2], total[i]);
}

// add_up: a tile's sums, from `at` on in the ring. done(wave): its totals are complete.

#if WAVES == 1
// Those of a turn are added up while the next one's are made.
struct Sums {
  float of[BN / 2];
  Scales scales;
};

__device__ __forceinline__ void ask(Sums& sums, const Ring& ring, const Own& own, const Place& at) {
  await_phase(ring.full + 8 * at.stage, at.parity);
  sums.scales = scales_of(own, at.stage);
  ask(sums.of, ring, own, at.stage, 0);
}

// All but the products of `left` turns have been made: the turn of these sums is free.
template <int left>
__device__ __forceinline__ void add(float (&total)[BN / 2], Sums& sums, const Ring& ring, int stage, int lane) {
  await_sum<left>(sums.of);
  set_free(ring, stage, lane);
  add(total, sums.of, sums.scales, 0);
}

template <class Done>
__device__ __forceinline__ void add_up(float (&total)[1][BN / 2], int turns, const Ring& ring, const Own& own, Place at,
                                       int lane, const Done& done) {
  Sums even, odd;
  int before = at.stage, t = 1;
  ask(even, ring, own, at);
  const auto next = [&](Sums& sums, Sums& sums_before) {
    advance<STAGES>(at);
    ask(sums, ring, own, at);
    add<1>(total[0], sums_before, ring, before, lane);
    before = at.stage;
  };
#pragma unroll 1
  for (; t + 1 < turns; t += 2) next(odd, even), next(even, odd);
  if (t < turns) {
    next(odd, even);
    add<0>(total[0], odd, ring, before, lane);
  } else {
    add<0>(total[0], even, ring, before, lane);
  }
  done(0);
}
#else
// Two sets of sums take turns: a wave's are added up while those of the next one are made.
template <class Done>
__device__ __forceinline__ void add_up(float (&total)[WAVES][BN / 2], int turns, const Ring& ring, const Own& own, Place at,
                                       int lane, const Done& done) {
  float even[BN / 2], odd[BN / 2];
  await_phase(ring.full + 8 * at.stage, at.parity);
  Scales scales = scales_of(own, at.stage);
  ask(even, ring, own, at.stage, 0);
  const auto others = [&](bool is_last) {  // all but the first wave are asked for, all but the last one added up
#pragma unroll
    for (int n = 1; n < WAVES; n++) {
      ask(n % 2 ? odd : even, ring, own, at.stage, n);
      await_sum<1>(n % 2 ? even : odd);
      add(total[n - 1], n % 2 ? even : odd, scales, n - 1);
      if (is_last) done(n - 1);
    }
  };
#pragma unroll 1
  for (int t = 1; t < turns; t++) {
    others(false);
    const Scales before = scales;
    const int stage = at.stage;
    advance<STAGES>(at);
    await_phase(ring.full + 8 * at.stage, at.parity);
    scales = scales_of(own, at.stage);
    ask(even, ring, own, at.stage, 0);
    await_sum<1>(odd);
    set_free(ring, stage, lane);
    add(total[WAVES - 1], odd, before, WAVES - 1);
  }
  if (turns == 0) {  // never: without a path on which it awaits all products the compiler lets none run ahead
    await_sum<0>(even);
    add(total[0], even, scales, 0);
    return;
  }
  others(true);
  await_sum<0>(odd);
  set_free(ring, at.stage, lane);
  add(total[WAVES - 1], odd, scales, WAVES - 1);
  done(WAVES - 1);
}
#endif
