import { useEffect, useRef, useState } from 'preact/hooks'

import { json, text } from './api.js'
import { History, parse } from './metrics.js'

const EVERY_MS = 2000
const LATENCIES = [
  ['First token', 'time_to_first_token_seconds'],
  ['Between tokens', 'inter_token_latency_seconds'],
  ['Whole answer', 'e2e_request_latency_seconds'],
  ['In the queue', 'request_queue_time_seconds'],
]

const seconds = (value) =>
  value === null ? '–' : value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`
const number = (value) => (value >= 100 ? Math.round(value).toLocaleString('en') : value.toFixed(1))
const percent = (value) => `${(100 * value).toFixed(0)} %`

export function Live({ state }) {
  const history = useRef(new History())
  const [, setTurn] = useState(0)
  useEffect(() => {
    const look = async () => {
      try {
        history.current.add(parse(await text('metrics')))
        setTurn((turn) => turn + 1)
      } catch {
        // the header says that the server cannot be reached
      }
    }
    look()
    const timer = setInterval(() => !document.hidden && look(), EVERY_MS)
    return () => clearInterval(timer)
  }, [])

  const now = history.current
  const blocks = now.get('max_gpu_block_num')
  const used = blocks ? (blocks - now.get('available_gpu_block_num')) / blocks : 0
  const asked = now.get('prefix_cache_query_tokens_total')
  const hits = asked ? now.get('prefix_cache_token_num_total') / asked : 0
  const drafts = now.get('spec_decode_num_draft_tokens_total')
  return (
    <aside class="live" aria-label="Live state">
      <div class="tiles">
        <Tile name="Running" value={now.get('num_requests_running')} note={`of ${now.get('max_batch_size') || '–'}`} />
        <Tile name="Waiting" value={now.get('num_requests_waiting') + now.get('num_requests_enqueued')} />
        <Tile name="Output tokens/s" value={number(now.rate('generation_tokens_total'))}
          lines={now.rates('generation_tokens_total')} />
        <Tile name="Prompt tokens/s" value={number(now.rate('prompt_tokens_total'))}
          lines={now.rates('prompt_tokens_total')} />
        <Tile name="KV cache" value={percent(used)} note={`${blocks} blocks`} bar={used} />
        <Tile name="Prefix hits" value={percent(hits)} note="of prompt tokens" bar={hits} />
        {!!drafts && (
          <Tile name="Drafts accepted" value={percent(now.get('spec_decode_num_accepted_tokens_total') / drafts)} />
        )}
        <Tile name="Requests" value={now.get('requests_number_total')} note="since the start" />
        <Tile name="Preempted" value={now.get('request_preempted_total')} note="since the start" />
      </div>
      <h2>Latency <small>of the last minute</small></h2>
      <table>
        <thead><tr><th /><th>p50</th><th>p95</th><th>p99</th></tr></thead>
        <tbody>
          {LATENCIES.map(([name, metric]) => (
            <tr key={metric}>
              <th scope="row">{name}</th>
              {[0.5, 0.95, 0.99].map((q) => <td key={q}>{seconds(now.quantile(metric, q))}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
      <h2>Plugins in use</h2>
      <ul class="why">
        {(state?.decisions ?? []).map(({ choice, reason }) => (
          <li key={choice}><b>{choice}</b><span>{reason}</span></li>
        ))}
      </ul>
      <details>
        <summary>Engine</summary>
        <ul class="lines">{(state?.report ?? []).map((line) => <li key={line}>{line}</li>)}</ul>
      </details>
      <Installed />
    </aside>
  )
}

function Tile({ name, value, note, bar, lines }) {
  return (
    <div class="tile">
      <span class="name">{name}</span>
      <span class="value">{value}</span>
      {note && <span class="quiet">{note}</span>}
      {bar !== undefined && <progress max="1" value={bar} aria-label={name} />}
      {lines && <Spark values={lines} />}
    </div>
  )
}

function Spark({ values }) {
  const shown = values.slice(-30)
  const most = Math.max(...shown, 1)
  const left = 30 - shown.length
  const at = (index) => (100 * (left + index)) / 29
  const points = shown.map((value, index) => `${at(index)},${22 - (20 * value) / most}`).join(' ')
  return (
    <svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true">
      <polyline points={points} />
    </svg>
  )
}

function Installed() {
  const [plugins, setPlugins] = useState(null)
  const open = async (event) => {
    if (event.target.open && !plugins) setPlugins((await json('plugins')).plugins)
  }
  const owners = Object.groupBy(plugins ?? [], ({ distribution }) => distribution)
  return (
    <details onToggle={open}>
      <summary>Installed plugins</summary>
      <ul class="lines">
        {Object.entries(owners).map(([name, found]) => (
          <li key={name}>
            <b>{name} {found[0].version}</b> {[...new Set(found.map(({ kind }) => kind))].join(', ')}
            {found.filter(({ status }) => status !== 'ok').map((plugin) => (
              <em key={plugin.name}> {plugin.kind} {plugin.name}: {plugin.reason}</em>
            ))}
          </li>
        ))}
      </ul>
    </details>
  )
}
