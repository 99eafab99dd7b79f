import { useEffect, useRef, useState } from 'preact/hooks'

import { chat } from './api.js'
import { Markdown } from './markdown.jsx'

const MAX_PICTURE = 8 * 1024 * 1024
const EXAMPLE_TOOL = [
  {
    type: 'function',
    function: {
      name: 'get_weather',
      description: 'The weather of a city',
      parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
    },
  },
]
const DEFAULTS = { system: '', temperature: '', maxTokens: '1024', tools: '', think: true }

const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader()
    reader.onload = () => resolve(reader.result)
    reader.onerror = () => reject(reader.error)
    reader.readAsDataURL(file)
  })

// Tool calls arrive in pieces that name their place.
function joined(calls, pieces) {
  const next = calls.map((call) => ({ ...call, function: { ...call.function } }))
  for (const piece of pieces) {
    const call = (next[piece.index] ??= { id: '', type: 'function', function: { name: '', arguments: '' } })
    if (piece.id) call.id = piece.id
    call.function.name += piece.function?.name ?? ''
    call.function.arguments += piece.function?.arguments ?? ''
  }
  return next
}

// A message as the API takes it.
function sent(message) {
  if (message.role === 'tool') {
    return { role: 'tool', tool_call_id: message.id, content: message.content }
  }
  if (message.role === 'assistant') {
    const calls = message.calls?.length ? { tool_calls: message.calls } : {}
    return { role: 'assistant', content: message.content || null, ...calls }
  }
  if (!message.pictures?.length) return { role: message.role, content: message.content }
  const pictures = message.pictures.map((url) => ({ type: 'image_url', image_url: { url } }))
  return { role: 'user', content: [...pictures, { type: 'text', text: message.content }] }
}

export function Chat({ state }) {
  const [messages, setMessages] = useState([])
  const [draft, setDraft] = useState('')
  const [pictures, setPictures] = useState([])
  const [options, setOptions] = useState(DEFAULTS)
  const [problem, setProblem] = useState('')
  const [stop, setStop] = useState(null)
  const end = useRef(null)
  useEffect(() => end.current?.scrollIntoView({ block: 'end' }), [messages])

  const attach = async (files) => {
    for (const file of files) {
      if (!file.type.startsWith('image/')) continue
      if (file.size > MAX_PICTURE) setProblem(`${file.name} is larger than 8 MiB`)
      else setPictures(await Promise.all([...pictures, dataUrl(file)]))
    }
  }

  const request = (history) => {
    const body = { model: state?.model, messages: history.map(sent) }
    if (options.system.trim()) body.messages.unshift({ role: 'system', content: options.system })
    if (options.temperature !== '') body.temperature = Number(options.temperature)
    if (options.maxTokens !== '') body.max_tokens = Number(options.maxTokens)
    if (options.tools.trim()) body.tools = JSON.parse(options.tools)
    if (!options.think) body.chat_template_kwargs = { enable_thinking: false }
    return body
  }

  const answer = async (history) => {
    const control = new AbortController()
    const began = performance.now()
    let said = { role: 'assistant', content: '', reasoning: '', calls: [] }
    const show = () => setMessages([...history, said])
    setProblem('')
    setStop(() => () => control.abort())
    show()
    try {
      for await (const chunk of chat(request(history), control.signal)) {
        const delta = chunk.choices[0]?.delta ?? {}
        const first = said.first ?? performance.now()
        said = {
          ...said,
          first: delta.content || delta.reasoning_content ? first : said.first,
          content: said.content + (delta.content ?? ''),
          reasoning: said.reasoning + (delta.reasoning_content ?? ''),
          calls: joined(said.calls, delta.tool_calls ?? []),
          reason: chunk.choices[0]?.finish_reason ?? said.reason,
          usage: chunk.usage ?? said.usage,
        }
        show()
      }
    } catch (error) {
      if (error.name === 'AbortError') said = { ...said, reason: 'stopped' }
      else setProblem(error.message)
    }
    const now = performance.now()
    said = { ...said, seconds: (now - (said.first ?? began)) / 1000, wait: (said.first ?? now) - began }
    show()
    setStop(null)
  }

  const send = (event) => {
    event?.preventDefault()
    if (stop || (!draft.trim() && !pictures.length)) return
    const history = [...messages, { role: 'user', content: draft, pictures }]
    setDraft('')
    setPictures([])
    answer(history)
  }
  const giveResult = (call, content) => {
    const history = [...messages, { role: 'tool', id: call.id, content }]
    const asked = messages.findLast((message) => message.role === 'assistant').calls
    const done = history.filter((message) => message.role === 'tool').map((message) => message.id)
    setMessages(history)
    if (asked.every(({ id }) => done.includes(id))) answer(history)
  }
  const set = (name) => (event) => {
    const { type, checked, value } = event.target
    setOptions({ ...options, [name]: type === 'checkbox' ? checked : value })
  }

  return (
    <section class="chat" aria-label="Chat">
      <div class="talk" aria-live="polite">
        {!messages.length && <Empty model={state?.model} />}
        {messages.map((message, index) => (
          <Message key={index} message={message} isOpen={stop && index === messages.length - 1}
            answered={messages} onResult={stop ? null : giveResult} />
        ))}
        {problem && <p class="problem" role="alert">{problem}</p>}
        <div ref={end} />
      </div>
      <form class="ask" onSubmit={send}
        onDragOver={(event) => event.preventDefault()}
        onDrop={(event) => { event.preventDefault(); attach(event.dataTransfer.files) }}>
        {!!pictures.length && (
          <div class="pictures">
            {pictures.map((url, index) => (
              <button type="button" title="Remove" key={index}
                onClick={() => setPictures(pictures.filter((_, other) => other !== index))}>
                <img src={url} alt="attached" />
              </button>
            ))}
          </div>
        )}
        <textarea aria-label="Message" placeholder="Ask something" rows={3} value={draft}
          onInput={(event) => setDraft(event.target.value)}
          onPaste={(event) => attach(event.clipboardData.files)}
          onKeyDown={(event) => {
            if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) send(event)
          }} />
        <div class="buttons">
          <label class="button" title="Attach a picture">
            Picture
            <input type="file" accept="image/*" multiple hidden
              onChange={(event) => { attach(event.target.files); event.target.value = '' }} />
          </label>
          <details class="options">
            <summary class="button">Options</summary>
            <div class="sheet">
              <label>System prompt <textarea rows={2} value={options.system} onInput={set('system')} /></label>
              <div class="pair">
                <label>Temperature
                  <input type="number" min="0" max="2" step="0.1" placeholder="default"
                    value={options.temperature} onInput={set('temperature')} />
                </label>
                <label>Most tokens
                  <input type="number" min="1" value={options.maxTokens} onInput={set('maxTokens')} />
                </label>
              </div>
              <label class="check">
                <input type="checkbox" checked={options.think} onChange={set('think')} /> let it think
              </label>
              <label>Tools, as JSON
                <textarea class="code" rows={4} value={options.tools} onInput={set('tools')} />
              </label>
              <button type="button" onClick={() =>
                setOptions({ ...options, tools: JSON.stringify(EXAMPLE_TOOL, null, 2) })}>
                Example tool
              </button>
            </div>
          </details>
          <button type="button" disabled={!messages.length || stop} onClick={() => setMessages([])}>New chat</button>
          <span class="grow" />
          {stop
            ? <button type="button" class="primary" onClick={stop}>Stop</button>
            : <button class="primary" disabled={!draft.trim() && !pictures.length}>Send</button>}
        </div>
      </form>
    </section>
  )
}

function Empty({ model }) {
  return (
    <div class="empty">
      <h1>{model ?? 'A model'}</h1>
      <p>Answers come from this server. Nothing leaves it.</p>
    </div>
  )
}

function Message({ message, isOpen, answered, onResult }) {
  const { role, content, reasoning, calls = [], pictures = [], usage } = message
  if (role === 'tool') return <article class="message tool"><b>Result</b><pre>{content}</pre></article>
  return (
    <article class={`message ${role}`}>
      {pictures.map((url, index) => <img key={index} src={url} alt="from you" />)}
      {reasoning && (
        <details class="thinking" open={isOpen && !content}>
          <summary>{isOpen && !content ? 'Thinking…' : 'Thoughts'}</summary>
          <p>{reasoning}</p>
        </details>
      )}
      {role === 'user' ? <p class="plain">{content}</p> : <Markdown text={content} />}
      {isOpen && !content && !reasoning && !calls.length && <span class="waiting" aria-label="waiting" />}
      {calls.map((call) => (
        <Call key={call.id} call={call} onResult={onResult}
          isDone={answered.some(({ role, id }) => role === 'tool' && id === call.id)} />
      ))}
      {usage && (
        <footer class="quiet">
          {usage.completion_tokens} tokens
          {message.seconds > 0 && ` · ${((usage.completion_tokens - 1) / message.seconds).toFixed(1)} tokens/s`}
          {message.wait > 0 && ` · first after ${(message.wait / 1000).toFixed(2)} s`}
          {!!usage.prompt_tokens_details?.cached_tokens &&
            ` · ${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`}
          {message.reason && message.reason !== 'stop' && ` · ${message.reason}`}
        </footer>
      )}
    </article>
  )
}

function Call({ call, isDone, onResult }) {
  const submit = (event) => {
    event.preventDefault()
    onResult(call, event.target.elements.result.value)
  }
  return (
    <div class="call">
      <code>{call.function.name}({call.function.arguments})</code>
      {onResult && !isDone && (
        <form onSubmit={submit}>
          <input name="result" aria-label="Result of the tool" placeholder="what the tool returns" />
          <button>Give result</button>
        </form>
      )}
    </div>
  )
}
