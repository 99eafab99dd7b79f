import preact from '@preact/preset-vite'
import { defineConfig } from 'vite'

// Everything the page needs goes into ../fd_web/page, under names that say what is in the file. The
// server has it below ui/; addresses are relative, so that a proxy may put the server below a path.
export default defineConfig({
  experimental: {
    renderBuiltUrl: (name, { hostType }) => (hostType === 'html' ? `ui/${name}` : { relative: true }),
  },
  plugins: [preact()],
  build: {
    outDir: '../fd_web/page',
    emptyOutDir: true,
    assetsDir: '',
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
})
