import { useEffect, useState } from 'preact/hooks'

// Loaded after the first paint. Raw HTML and pictures of the text stay text: what a model writes
// runs nothing and loads nothing.
let reader
const load = () =>
  (reader ??= import('markdown-it').then(({ default: MarkdownIt }) =>
    new MarkdownIt({ html: false, linkify: false, breaks: true }).disable(['image']),
  ))

export function Markdown({ text }) {
  const [write, setWrite] = useState(null)
  useEffect(() => {
    load().then((markdown) => setWrite(() => (source) => markdown.render(source)))
  }, [])
  if (!write) return <p class="plain">{text}</p>
  return <div class="text" dangerouslySetInnerHTML={{ __html: write(text) }} />
}
