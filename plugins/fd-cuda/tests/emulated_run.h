// Behind the kernel's source: one call runs the whole grid, cluster after cluster.

static thread_local void (*body)();
static void enter() {
  body();
  block->done[block->current] = true;
  swapcontext(&block->fibers[block->current], &block->main);
}

// What the kernel is called with; CALL says which argument is where.
struct Arguments {
  void* p[16];
  float f[4];
  int n[12];
};
static const Arguments* arguments;

static void call() {
  const auto& [p, f, n] = *arguments;
  CALL;
}

static void run_block(Index at, std::vector<char*>* anchors, std::barrier<>* cluster) {
  auto own = std::make_unique<Block>();
  block = own.get();
  block->anchors = anchors, block->cluster = cluster, block->rank = at.z;
  (*anchors)[at.z] = &anchor;
  cluster->arrive_and_wait();
  blockIdx = at, body = call;
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

extern "C" void run_grid(int width, int height, const Arguments* given) {
  arguments = given;
  for (int x = 0; x < width; ++x)
    for (int y = 0; y < height; ++y) {
      std::vector<char*> anchors(CLUSTER);
      std::barrier<> cluster(CLUSTER);
      std::vector<std::thread> blocks;
      for (int z = 0; z < CLUSTER; ++z) blocks.emplace_back(run_block, Index{x, y, z}, &anchors, &cluster);
      for (auto& thread : blocks) thread.join();
    }
}
