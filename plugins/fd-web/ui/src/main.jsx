import { render } from 'preact'
import { useCallback, useEffect, useState } from 'preact/hooks'

import { json, saveKey } from './api.js'
import { Chat } from './chat.jsx'
import { Live } from './live.jsx'

function App() {
  const [state, setState] = useState(null)
  const [problem, setProblem] = useState(null)

  const look = useCallback(async () => {
    try {
      setState(await json('state'))
      setProblem(null)
    } catch (error) {
      setProblem(error)
    }
  }, [])
  useEffect(() => {
    look()
    const timer = setInterval(look, 5000)
    return () => clearInterval(timer)
  }, [look])

  if (problem?.status === 401) return <KeyForm onKey={look} />
  const health = problem ? 'unreachable' : !state ? 'connecting' : state.health
  return (
    <>
      <header class="bar">
        <strong class="brand">FastDeploy</strong>
        {state && <span class="model" title={state.architecture}>{state.model}</span>}
        <span class={`health ${health}`} role="status">{health}</span>
        <span class="version">{state && `v${state.version} · ${state.device}`}</span>
      </header>
      <main>
        <Chat state={state} />
        <Live state={state} />
      </main>
    </>
  )
}

function KeyForm({ onKey }) {
  const submit = (event) => {
    event.preventDefault()
    saveKey(event.target.elements.key.value.trim())
    onKey()
  }
  return (
    <>
      <header class="bar"><strong class="brand">FastDeploy</strong></header>
      <form class="key" onSubmit={submit}>
        <h1>This server asks for a key</h1>
        <label>API key <input name="key" type="password" autocomplete="off" autofocus required /></label>
        <button class="primary">Continue</button>
        <p class="quiet">It stays in this tab and is sent to this server alone.</p>
      </form>
    </>
  )
}

const app = document.getElementById('app')
app.textContent = ''
render(<App />, app)
