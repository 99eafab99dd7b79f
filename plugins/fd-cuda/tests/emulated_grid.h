// After the kernel's source: one call runs the grid of KERNEL, cluster after cluster. Arguments as a launch has
// them.

#ifndef CLUSTER
#define CLUSTER 1
#endif
extern "C" {
int num_threads = FIBERS, num_blocks = CLUSTER;
}

static void** given;

template <class... A, size_t... I>
static void apply(void (*kernel)(A...), std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<A>*)given[I]...);
}
template <class... A>
static void apply(void (*kernel)(A...)) { apply(kernel, std::index_sequence_for<A...>()); }

static void enter() {
  apply(KERNEL);
  block->done[block->current] = true;
  swapcontext(&block->fibers[block->current], &block->main);
}

static void run_block(Index at, std::vector<char*>* anchors, std::barrier<>* cluster) {
  auto own = std::make_unique<Block>();
  block = own.get(), blockIdx = at;
  block->anchors = anchors, block->cluster = cluster, block->rank = at.z;
  (*anchors)[at.z] = &anchor;
  cluster->arrive_and_wait();
  for (int i = 0; i < FIBERS; ++i) {
    ucontext_t& fiber = block->fibers[i];
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = &block->stacks[i * STACK], fiber.uc_stack.ss_size = STACK;
    fiber.uc_link = nullptr;
    makecontext(&fiber, enter, 0);
  }
  for (bool more = true; more;) {
    more = false;
    for (int i = 0; i < FIBERS; ++i) {
      if (block->done[i]) continue;
      block->current = i, threadIdx = {i, 0, 0}, more = true;
      swapcontext(&block->main, &block->fibers[i]);
    }
  }
  cluster->arrive_and_wait();
}

extern "C" void run_grid(int width, int height, void** arguments) {
  given = arguments, gridDim = {width, height, CLUSTER};
  for (int x = 0; x < width; ++x)
    for (int y = 0; y < height; ++y) {
      std::vector<char*> anchors(CLUSTER);
      std::barrier<> cluster(CLUSTER);
      std::vector<std::thread> others;
      for (int z = 1; z < CLUSTER; ++z) others.emplace_back(run_block, Index{x, y, z}, &anchors, &cluster);
      run_block({x, y, 0}, &anchors, &cluster);
      for (auto& thread : others) thread.join();
    }
}
