// Plays episodes whose observations number the turns; prints each number once the turn's outcome is in the journal.
// Usage: turns URL TOKEN NAME JOURNAL CLIENT FIRST EPISODES PATIENCE
// Exits with 0 once all is acknowledged, with 2 if it is refused, and with 3 if the gateway is away.

#include "../../clients/cpp/stagecoach_client.hpp"

#include <cstdio>
#include <cstdlib>

int main(int, char** arguments) {
    try {
        stagecoach::Options options{arguments[1], arguments[2], arguments[3], arguments[4]};
        options.patience_seconds = std::atof(arguments[8]);
        stagecoach::Session session(options);
        const int client = std::atoi(arguments[5]);
        int turn = std::atoi(arguments[6]);
        std::mt19937 draw(static_cast<unsigned>(client + turn));
        for (int episodes = std::atoi(arguments[7]); episodes > 0; --episodes, ++turn) {
            session.reset(std::vector<int>{client, turn});
            for (int left = static_cast<int>(draw() % 9); left >= 0; --left) {
                std::this_thread::sleep_for(std::chrono::milliseconds(draw() % 20));
                session.step(1.0, std::vector<int>{client, turn + 1}, left == 0, false, {{"turn", turn}});
                std::printf("%d\n", turn++);
                std::fflush(stdout);
            }
        }
        const std::size_t left = session.settle(60);
        session.close();
        return left > 0 ? 1 : 0;
    } catch (const stagecoach::Refused& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 2;
    } catch (const stagecoach::Away& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 3;
    }
}
