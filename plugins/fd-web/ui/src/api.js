// Requests to the server that this page came from, whose paths are below the page's own. The key stays in this tab.

const KEY = 'fastdeploy-key'

export const savedKey = () => sessionStorage.getItem(KEY) ?? ''
export const saveKey = (key) => sessionStorage.setItem(KEY, key)

export class Refused extends Error {
  constructor(status, message) {
    super(message)
    this.status = status
  }
}

const headers = () => (savedKey() ? { authorization: `Bearer ${savedKey()}` } : {})

async function checked(answer) {
  if (answer.ok) return answer
  let message = `${answer.status} ${answer.statusText}`
  try {
    message = (await answer.json()).error.message
  } catch {
    // not JSON: the status says it
  }
  throw new Refused(answer.status, message)
}

export const text = async (path) =>
  (await checked(await fetch(path, { headers: headers() }))).text()

export const json = async (path) =>
  (await checked(await fetch(path, { headers: headers() }))).json()

// The chunks of a streamed chat completion.
export async function* chat(body, signal) {
  const answer = await checked(
    await fetch('v1/chat/completions', {
      method: 'POST',
      headers: { ...headers(), 'content-type': 'application/json' },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    }),
  )
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ''
  for (;;) {
    const { value, done } = await reader.read()
    if (done) return
    const events = (rest + value).split('\n\n')
    rest = events.pop()
    for (const event of events) {
      const data = event.split('\n').find((line) => line.startsWith('data:'))?.slice(5).trim()
      if (!data || data === '[DONE]') continue
      const chunk = JSON.parse(data)
      if (chunk.error) throw new Refused(500, chunk.error.message)
      yield chunk
    }
  }
}
