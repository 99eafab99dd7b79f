// A team whose threads come and go; test_team.py runs it, under ThreadSanitizer, too. For each size so many rounds
// (argument 1). Prints how often how many threads did an operation; exits with 1 where a number is wrong.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "team.h"

using fdcpu::Team;

namespace {

// Each operation adds 2 to every number, every other one in two phases: who added first is not who adds then. Half of
// these take turns in the second one.
bool adds_up(int size, int num_rounds) {
    constexpr int kTurns = 37;
    Team team(size, {});
    std::vector<long> numbers(4096);
    std::vector<int> crews(size + 1);
    std::atomic<bool> is_over{false};
    std::thread disturber([&] {
        std::mt19937 random(1);
        while (!is_over) {
            team.stay_away(random() % 2);
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
        }
    });
    long wanted = 0;
    bool is_right = true;
    for (int round = 0; round < num_rounds && is_right; ++round) {
        const int64_t count = 1 + round % 40;
        const auto add = [&](int part, int crew, long value) {
            for (size_t i = numbers.size() * part / crew; i < numbers.size() * (part + 1) / crew; ++i) numbers[i] += value;
        };
        team.run(count, [&](int64_t operation, int rank, int crew) {
            add(rank, crew, operation % 2 ? 1 : 2);
            if (operation % 2) team.barrier(crew);
            if (operation % 4 == 1) add((rank + 1) % crew, crew, 1);
            if (operation % 4 == 3)
                for (int64_t turn = team.turn(); turn < kTurns; turn = team.turn()) add(int(turn), kTurns, 1);
            if (rank == 0) ++crews[crew];
        });
        wanted += 2 * count;
        for (long number : numbers) is_right &= number == wanted;
        if (round % 40 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));  // longer than they look
    }
    is_over = true;
    disturber.join();
    std::printf("%d threads:", size);
    for (int crew = 1; crew <= size; ++crew) std::printf(" %d by %d", crews[crew], crew);
    std::printf("%s\n", is_right ? "" : ", WRONG");
    return is_right;
}

// One that ends while its threads answer.
void ends(int size) {
    Team team(size, {});
    for (int i = 0; i < 2; ++i) team.run(1, [](int64_t, int, int) {});
}

}  // namespace

int main(int, char **arguments) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const int num_rounds = std::atoi(arguments[1]);
    bool is_right = true;
    for (int size : {2, 3, 5}) is_right &= adds_up(size, num_rounds);
    for (int i = 0; i < 20 * num_rounds; ++i) ends(2 + i % 2);
    return is_right ? 0 : 1;
}
