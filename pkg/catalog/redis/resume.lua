-- Ends a suspension: the catalog goes on as a new incarnation, with a digest of its own.
local P, coordinator, incarnation = ARGV[1], ARGV[2], ARGV[3]
local call = redis.call
local leader = call('HGET', P .. 'leader', 'e') or '0'
if leader ~= coordinator or leader == '0' then return { 0, leader } end
if call('EXISTS', P .. 'suspended') == 0 then return { 1, coordinator } end
local restoring = call('HGET', P .. 'suspended', 'x')
if restoring then return { 2, restoring } end
local seq = call('GET', P .. 'seq')
local lost = call('HGETALL', P .. 'lost')
call('HSET', P .. 'ancestors', call('GET', P .. 'incarnation') or '', seq)
for i = 1, #lost, 2 do
  local has = tonumber(call('HGET', P .. 'ancestors', lost[i]) or '0')
  if tonumber(lost[i + 1]) > has then call('HSET', P .. 'ancestors', lost[i], lost[i + 1]) end
end
call('DEL', P .. 'lost')
call('SET', P .. 'incarnation', incarnation)
local next = call('INCR', P .. 'seq')
local digest = redis.sha1hex((call('GET', P .. 'digest') or '') .. '\n' .. incarnation)
call('SET', P .. 'digest', digest)
call('XADD', P .. 'log', string.format('%.0f', next) .. '-0', 'e', coordinator, 'i', '', 'h', digest)
call('DEL', P .. 'suspended')
return { 1, coordinator }
