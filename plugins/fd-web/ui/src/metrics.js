// The Prometheus text of /metrics, and what can be read from two of them.

const LINE = /^fastdeploy:([a-z0-9_]+)(?:\{(.*)\})? (\S+)$/
const WINDOW_MS = 60_000

export function parse(text) {
  const found = { values: {}, buckets: {} }
  for (const line of text.split('\n')) {
    const match = LINE.exec(line)
    if (!match) continue
    const [, name, labels = '', number] = match
    const bound = /le="([^"]+)"/.exec(labels)?.[1]
    if (bound !== undefined) {
      const bounds = (found.buckets[name.replace(/_bucket$/, '')] ??= [])
      bounds.push([bound === '+Inf' ? Infinity : Number(bound), Number(number)])
    } else {
      found.values[name] = (found.values[name] ?? 0) + Number(number)
    }
  }
  return found
}

// The share q of what a histogram counted between two moments, in its own unit; null: nothing.
export function quantile(before, now, name, q) {
  const bounds = now.buckets[name] ?? []
  const old = new Map(before?.buckets[name] ?? [])
  const counts = bounds.map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)])
  const total = counts.at(-1)?.[1] ?? 0
  if (!total) return null
  let [low, below] = [0, 0]
  for (const [bound, count] of counts) {
    if (count >= q * total) {
      if (bound === Infinity) return low
      return low + ((bound - low) * (q * total - below)) / Math.max(count - below, 1)
    }
    ;[low, below] = [bound, count]
  }
  return low
}

// Samples of the last minute: the first is what rates and quantiles are counted from.
export class History {
  samples = []

  add(now, at = Date.now()) {
    this.samples.push({ ...now, at })
    while (this.samples.length > 2 && at - this.samples[1].at > WINDOW_MS) this.samples.shift()
  }

  get first() {
    return this.samples[0]
  }

  get last() {
    return this.samples.at(-1)
  }

  rate(name) {
    return this.rates(name).at(-1) ?? 0
  }

  // Per second, between each sample and the next.
  rates(name) {
    return this.samples.slice(1).map((now, index) => {
      const before = this.samples[index]
      const seconds = (now.at - before.at) / 1000
      return Math.max(0, ((now.values[name] ?? 0) - (before.values[name] ?? 0)) / seconds)
    })
  }

  quantile(name, q) {
    return this.first === this.last ? null : quantile(this.first, this.last, name, q)
  }

  get(name) {
    return this.last?.values[name] ?? 0
  }
}
