import preact from '@preact/preset-vite'
import { defineConfig } from 'vite'

// Everything the page needs goes into ../fd_web/page, under names that say what is in the file.
export default defineConfig({
  base: '/ui/',
  plugins: [preact()],
  build: {
    outDir: '../fd_web/page',
    emptyOutDir: true,
    assetsDir: '',
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
})
